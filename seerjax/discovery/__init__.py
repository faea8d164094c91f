"""Search on a single problem: environments, policies, archive, state selection and records."""
