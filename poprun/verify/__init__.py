"""`poprun verify`: proves for a program that its bits do not depend on how its replicas are spread."""
