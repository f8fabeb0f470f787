"""Sort six digits: a policy of 0.44 M parameters that mixes several ways to answer learns the rewarded one."""
