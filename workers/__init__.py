"""Workers of a run, by role: a plain class first, a process of Ray second.

`start` and `worker_set` put the workers of a configuration together; only `rlsys.launch` imports this package.
"""
