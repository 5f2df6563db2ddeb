// Runs before the first paint: sets the theme chosen earlier, else the system's applies.
{
  let theme = null;
  try {
    theme = localStorage.getItem("quire.theme");
  } catch {
    // Storage is forbidden: the system's theme applies.
  }
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
}
