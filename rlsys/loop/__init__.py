"""The loop of one training job: the driver, its queue of groups, its ledger, and what each step does.

Nothing here imports Ray, a model library, or a worker; the driver reaches workers through `rlsys.contracts`.
"""
