"""The certificate authority and the identities it signs."""
