"""What all tests share: one thread for torch, in this process and in those that tests begin."""

import os

# before torch is imported. Tests run two at a time, and their products are small: threads would wait for each other.
# A test that is about threads sets their number itself.
os.environ.setdefault("OMP_NUM_THREADS", "1")
