"""General helpers: deadlines, seeds, files, imports, logs, signals. They import no other module of rlsys."""
