"""A model trained through an environment of verifiers, which knows nothing of headgate."""
