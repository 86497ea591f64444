"""Data: rows from folders, files, the hub and procedures, in one shape, and a loader that resumes."""
