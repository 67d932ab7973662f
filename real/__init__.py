"""The real backend: the plans of simdist, executed with torch.distributed."""
