"""Evaluation: the paper's suites through lm-evaluation-harness, MQAR, and needles in haystacks."""
