"""The spawn family: what it has from torch, and what it has beyond."""
