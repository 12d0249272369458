"""APIs of other systems over the plane's service, one package each; `apis.py` puts them beside the native one."""
