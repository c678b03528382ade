"""Operations of networks that are compiled for a CPU, where torch's own leave time on the table."""
