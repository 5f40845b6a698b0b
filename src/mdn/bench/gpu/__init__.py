"""Looking at the Triton kernels without a GPU: compiled for absent devices, timed statically, interpreted."""
