"""Reading and judging metric values."""
