"""How published weights travel: directories on a shared file system (`filesystem`)."""
