"""What an operator sees: events, explanations, signals, timelines, metrics."""
