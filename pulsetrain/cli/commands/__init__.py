"""What each command accepts. These modules import nothing slow, so that help, completion and errors are quick."""
