"""The native API's handlers: requests turned into calls, and nothing else. The table of routes is in `rollyard.plane.api.app`."""
