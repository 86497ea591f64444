"""The application, made when this is imported."""

from door import Door

app = Door()
