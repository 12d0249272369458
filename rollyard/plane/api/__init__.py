"""The native API: the table of routes, handlers, the OpenAPI document."""
