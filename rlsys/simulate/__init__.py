"""The real driver on simulated workers and a virtual clock: what a cluster would do, before there is one."""
