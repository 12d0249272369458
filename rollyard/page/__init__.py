"""The page where people see what an agent did: server-made HTML over a store, no build step, nothing from outside.

Agent output is hostile: everything is escaped by the templates, and the content security policy allows only this server's own
style sheet and scripts. Read-only unless a token is given. `app.py` has the routes, `views.py` what they show.
"""
