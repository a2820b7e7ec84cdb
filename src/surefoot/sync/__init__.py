"""Weights from the trainer to a sampler of another process: cut into buckets, carried, and proved to have arrived."""
