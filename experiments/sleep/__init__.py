"""Sleep-time compute: training nano for it, and its protocol."""
