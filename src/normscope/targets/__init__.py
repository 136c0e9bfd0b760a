"""What a user can point at."""
