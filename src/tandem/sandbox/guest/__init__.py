"""The half that runs inside a sandbox: standard library only, and nothing else of Tandem is there."""
