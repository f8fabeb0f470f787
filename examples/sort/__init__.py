"""Sort six digits: a policy of 0.44 M parameters that knows several ways to answer and learns which one pays."""
