"""The road of a request: what a session worker asks of a replica, what it gets back, and which replica it asks.

Pure: no Ray, no torch, no engine. Session workers and the simulator use it.
"""
