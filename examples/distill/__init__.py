"""A model learns sums from a teacher's log-probabilities, from rewards, and from both."""
