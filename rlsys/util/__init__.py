"""General helpers: deadlines, seeds, files, imports, signals. They import no other module of rlsys."""
