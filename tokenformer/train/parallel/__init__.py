"""One run on many processes: ranks, the device mesh, DDP, FSDP2 and tensor parallelism."""
