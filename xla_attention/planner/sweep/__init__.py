"""A grid of training steps, each predicted by the compiler."""
