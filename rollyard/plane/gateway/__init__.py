"""The way from a caller to a port inside an instance."""
