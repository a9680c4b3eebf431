"""How handlers subscribe and unsubscribe, publish, and query their engine."""
