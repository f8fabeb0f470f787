"""The loop of one training job: the driver, its queue of groups, its ledger, and the parts of a step.

No module here imports Ray, a model library or a worker; the driver reaches workers through `rlsys.contracts`.
"""
