"""The kernels, in Triton. Importing this package imports triton, so only a call that runs them does."""
