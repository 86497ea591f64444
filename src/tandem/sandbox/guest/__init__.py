"""The part that runs inside a sandbox: uses only the standard library; the rest of Tandem is not available there."""
