"""How handlers subscribe and unsubscribe, and what they may ask an engine."""
