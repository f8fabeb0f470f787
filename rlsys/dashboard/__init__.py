"""The dashboard: reads what runs write, and nothing else. Nothing in a run reads or waits for what is here."""
