// Browsers let pages of a folder read no other files, so the search works on a server alone: where it cannot work, it is not shown.
document.documentElement.classList.toggle("from-file", location.protocol === "file:");
