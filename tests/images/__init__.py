"""The gateway's image, built without Docker, and the processes of compose.yaml that run in it."""
