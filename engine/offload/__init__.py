"""Offloading: what a step does not need now lives in host memory or in a file, and comes back in time.

tiers        what each tier holds, byte for byte, and the host arena
link         copies between device and host, and the threads beside the training thread
nvme         files without the page cache
layout       where each tensor of a unit (a block, or the rest of the model) lies in its tier; torch-free
states       a unit's weights and optimizer states in host memory or in a file
optimizer    gradients down, the update on the host, weights up
parameters   a block's weights on the device only while it runs
activations  saved tensors on the host between forward and backward
probe        bandwidths of this machine, measured once
"""
