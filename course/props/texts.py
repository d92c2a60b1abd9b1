"""The texts that lesson 01 trains vocabularies on and counts tokens of.

`ENGLISH` and `KOREAN` say the same, sentence by sentence. `ARTICLE_1` is the first article of the
Universal Declaration of Human Rights (United Nations, 1948) in eight languages: one meaning, so
whatever differs between the token counts is the tokenizer's doing, or the script's.
"""

ENGLISH = """\
All people in our town are free to speak and to learn. Nobody is born better than another, and
all have the same rights. Every child should learn to read, and every teacher should act with
patience. We are equal before the law, at the market and in the school. People have reason and
conscience, and they should use both of them. When two neighbours argue, they should speak to one
another in a friendly spirit. A free person may think, read and write what seems right to them.
Work has its dignity, and so has rest after work. Those who are strong should help those who are
weak. The old stories of the town are told by all human beings who live here. They are endowed
with a good memory, and they act on it. In the evening the people meet, and they are equal again.
Rights and duties belong together like brothers. That is the spirit in which we should live
towards one another.
"""

KOREAN = """\
우리 마을의 모든 사람은 자유롭게 말하고 배운다. 누구도 남보다 낫게 태어나지 않으며 모든 사람의
권리는 같다. 모든 아이는 읽기를 배워야 하며 모든 선생은 참을성 있게 행동하여야 한다. 우리는 법
앞에서, 시장에서, 그리고 학교에서 동등하다. 인간은 이성과 양심이 있으며 그 둘을 모두 써야 한다. 두
이웃이 다툴 때에는 서로 형제의 정신으로 말하여야 한다. 자유로운 인간은 옳다고 여기는 것을
생각하고 읽고 쓸 수 있다. 일에는 존엄이 있으며 일한 뒤의 쉼에도 존엄이 있다. 강한 사람은 약한
사람을 도와야 한다. 마을의 옛이야기는 여기 사는 모든 인간이 서로 들려준다. 인간은 좋은 기억을
부여받았으며 그에 따라 행동한다. 저녁이면 사람들이 모이고 모두 다시 동등하다. 권리와 의무는 형제처럼
함께 있다. 그것이 우리가 서로에게 행동하여야 하는 정신이다.
"""

ARTICLE_1 = {
    "English": (
        "All human beings are born free and equal in dignity and rights. They are endowed with"
        " reason and conscience and should act towards one another in a spirit of brotherhood."
    ),
    "German": (
        "Alle Menschen sind frei und gleich an Würde und Rechten geboren. Sie sind mit Vernunft"
        " und Gewissen begabt und sollen einander im Geist der Brüderlichkeit begegnen."
    ),
    "French": (
        "Tous les êtres humains naissent libres et égaux en dignité et en droits. Ils sont doués"
        " de raison et de conscience et doivent agir les uns envers les autres dans un esprit de"
        " fraternité."
    ),
    "Russian": (
        "Все люди рождаются свободными и равными в своем достоинстве и правах. Они наделены"
        " разумом и совестью и должны поступать в отношении друг друга в духе братства."
    ),
    "Arabic": (
        "يولد جميع الناس أحرارا متساوين في الكرامة والحقوق، وقد وهبوا عقلا وضميرا وعليهم أن يعامل"
        " بعضهم بعضا بروح الإخاء."
    ),
    "Hindi": (
        "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता और समानता प्राप्त है। उन्हें बुद्धि"
        " और अन्तरात्मा की देन प्राप्त है और परस्पर उन्हें भाईचारे के भाव से बर्ताव करना चाहिए।"
    ),
    "Chinese": (
        "人人生而自由，在尊严和权利上一律平等。他们赋有理性和良心，并应以兄弟关系的精神相对待。"
    ),
    "Korean": (
        "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다. 인간은 천부적으로"
        " 이성과 양심을 부여받았으며 서로 형제애의 정신으로 행동하여야 한다."
    ),
}
