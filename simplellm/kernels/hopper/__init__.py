"""The ops on a Hopper GPU, in Triton and Gluon. Nobody imports this package before it is needed: triton is optional."""
