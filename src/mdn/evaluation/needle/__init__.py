"""Needles in haystacks of our own making: texts, examples, and a tiny model trained to find them."""
