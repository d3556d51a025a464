"""What a method costs in quality: tasks whose answers are scored, method by method, against full verification."""
