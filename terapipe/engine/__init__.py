"""The torch.distributed back end: runs a schedule on real processes."""
