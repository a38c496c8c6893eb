// To the theme's search, a hyphen before a word excludes it. Here it begins an option, such as --sweep.
document.addEventListener("input", ({ target }) => {
  if (target.matches(".md-search__input")) {
    target.value = target.value.replace(/(^|\s)-+(?=\w)/g, "$1")
  }
}, true)
