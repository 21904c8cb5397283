"""The proof that crashes lose and double nothing: a system under seeded faults, and a checker that knows nothing of headgate."""
