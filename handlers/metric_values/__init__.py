"""How metric values are read, converted and compared."""
