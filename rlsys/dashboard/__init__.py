"""Dashboard: reads the files of runs. A run reads nothing from the dashboard and never waits for it."""
