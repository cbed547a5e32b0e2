"""Data parallelism over ranks: plain (all-reduced gradients), ZeRO-1, ZeRO-2 and ZeRO-3.

zero    what each rank keeps of parameters, gradients and optimizer states
launch  one process a rank, watched by the run's process
rank    the process of one rank
fake    rank 0 of any number of ranks without processes, for simulation
"""
