"""What staleness does to training, and what gradient alignment control does about it, measured."""
